"""GPU memory: pools made with CUDA's virtual-memory calls, ordered by interprocess events.

The exporter reserves one address range of the pool's largest size and maps segments in it; each
consumer does the same on its own GPU with the segments it imports.  Creation handles go right
after mapping, so physical memory returns when the last process has unmapped it.  Each slot has one
ready event in the exporter and one release event in each consumer; a steady hand-off is one
record and one wait for readiness, one record and some queries for release, and nothing else.
"""

from asyncvmm._backends.cuda_consumer import CudaConsumerRegion
from asyncvmm._backends.cuda_exporter import CudaExporterRegion

__all__ = ["CudaConsumerRegion", "CudaExporterRegion"]
