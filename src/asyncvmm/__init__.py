"""Move tensors between processes without moving the bytes, from asyncio.

Importing this package imports neither torch nor CUDA and starts nothing.
"""

from asyncvmm._consumer.consumer import Consumer as Consumer
from asyncvmm._consumer.opening import connect as connect
from asyncvmm._consumer.owner import Batch as Batch
from asyncvmm._consumer.owner import Owner as Owner
from asyncvmm._consumer.reconnecting import ReconnectingConsumer as ReconnectingConsumer
from asyncvmm._consumer.statistics import ConsumerState as ConsumerState
from asyncvmm._errors import AccessDeniedError as AccessDeniedError
from asyncvmm._errors import ArgumentError as ArgumentError
from asyncvmm._errors import AsyncVMMError as AsyncVMMError
from asyncvmm._errors import AttentionGroupError as AttentionGroupError
from asyncvmm._errors import BackendError as BackendError
from asyncvmm._errors import ClosedError as ClosedError
from asyncvmm._errors import CopyError as CopyError
from asyncvmm._errors import DeliveryError as DeliveryError
from asyncvmm._errors import DescriptorLimitError as DescriptorLimitError
from asyncvmm._errors import DeviceLostError as DeviceLostError
from asyncvmm._errors import EndOfStream as EndOfStream
from asyncvmm._errors import ExporterLimitError as ExporterLimitError
from asyncvmm._errors import ExporterNotFoundError as ExporterNotFoundError
from asyncvmm._errors import ForkError as ForkError
from asyncvmm._errors import HandshakeError as HandshakeError
from asyncvmm._errors import InvalidTensorError as InvalidTensorError
from asyncvmm._errors import LocalProtocolError as LocalProtocolError
from asyncvmm._errors import NameInUseError as NameInUseError
from asyncvmm._errors import OwnersOutstandingWarning as OwnersOutstandingWarning
from asyncvmm._errors import OwnerTooLargeError as OwnerTooLargeError
from asyncvmm._errors import PeerLostError as PeerLostError
from asyncvmm._errors import PoolMemoryError as PoolMemoryError
from asyncvmm._errors import ProtocolError as ProtocolError
from asyncvmm._errors import RankError as RankError
from asyncvmm._errors import ReleasedError as ReleasedError
from asyncvmm._errors import RemoteProtocolError as RemoteProtocolError
from asyncvmm._errors import VersionMismatchError as VersionMismatchError
from asyncvmm._errors import WouldBlock as WouldBlock
from asyncvmm._exporter.acknowledgement import Acknowledgement as Acknowledgement
from asyncvmm._exporter.explaining import Explanation as Explanation
from asyncvmm._exporter.explaining import Obstacle as Obstacle
from asyncvmm._exporter.exporter import Exporter as Exporter
from asyncvmm._exporter.latencies import Latencies as Latencies
from asyncvmm._exporter.opening import open_exporter as open_exporter
from asyncvmm._exporter.reservation import Reservation as Reservation
from asyncvmm._exporter.reservation import WritableOwner as WritableOwner
from asyncvmm._exporter.statistics import ConsumerStatistics as ConsumerStatistics
from asyncvmm._exporter.statistics import OwnerStatistics as OwnerStatistics
from asyncvmm._exporter.statistics import PoolStatistics as PoolStatistics
from asyncvmm._exporter.statistics import SlotCounts as SlotCounts
from asyncvmm._groups import AttentionGroup as AttentionGroup
from asyncvmm._ticket import OwnerTicket as OwnerTicket
from asyncvmm._ticket import Ticket as Ticket
from asyncvmm._ticket import Tickets as Tickets
from asyncvmm._ticket_errors import BorrowedTicketError as BorrowedTicketError
from asyncvmm._ticket_errors import ForeignTicketError as ForeignTicketError
from asyncvmm._ticket_errors import LostTicketError as LostTicketError
from asyncvmm._ticket_errors import PackedReleaseError as PackedReleaseError
from asyncvmm._ticket_errors import RefusedTicketError as RefusedTicketError
from asyncvmm._ticket_errors import ReleasedTicketError as ReleasedTicketError
from asyncvmm._ticket_errors import StaleTicketError as StaleTicketError
from asyncvmm._ticket_errors import TicketError as TicketError
from asyncvmm._types import Broadcast as Broadcast
from asyncvmm._types import Compete as Compete
from asyncvmm._types import Group as Group
from asyncvmm._types import Outcome as Outcome
from asyncvmm._types import TensorSpec as TensorSpec

__version__ = "0.1.0"

__all__ = [
    "AccessDeniedError",
    "Acknowledgement",
    "ArgumentError",
    "AsyncVMMError",
    "AttentionGroup",
    "AttentionGroupError",
    "BackendError",
    "Batch",
    "BorrowedTicketError",
    "Broadcast",
    "ClosedError",
    "Compete",
    "Consumer",
    "ConsumerState",
    "ConsumerStatistics",
    "CopyError",
    "DeliveryError",
    "DescriptorLimitError",
    "DeviceLostError",
    "EndOfStream",
    "Explanation",
    "Exporter",
    "ExporterLimitError",
    "ExporterNotFoundError",
    "ForeignTicketError",
    "ForkError",
    "Group",
    "HandshakeError",
    "InvalidTensorError",
    "Latencies",
    "LocalProtocolError",
    "LostTicketError",
    "NameInUseError",
    "Obstacle",
    "Outcome",
    "Owner",
    "OwnerStatistics",
    "OwnerTicket",
    "OwnerTooLargeError",
    "OwnersOutstandingWarning",
    "PackedReleaseError",
    "PeerLostError",
    "PoolMemoryError",
    "PoolStatistics",
    "ProtocolError",
    "RankError",
    "ReconnectingConsumer",
    "RefusedTicketError",
    "ReleasedError",
    "ReleasedTicketError",
    "RemoteProtocolError",
    "Reservation",
    "SlotCounts",
    "StaleTicketError",
    "TensorSpec",
    "Ticket",
    "TicketError",
    "Tickets",
    "VersionMismatchError",
    "WouldBlock",
    "WritableOwner",
    "__version__",
    "connect",
    "open_exporter",
]
