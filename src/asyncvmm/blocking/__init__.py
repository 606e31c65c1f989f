"""The same exporter and consumer for code that is not async: plain loops and threads.

::

    with blocking.open_exporter("vision", route=asyncvmm.Broadcast(2)) as exporter:
        ack = exporter.send({"image_0": image}, key="request-17")
        ack.result(timeout=5)

    with blocking.connect("vision", rank=0) as consumer:
        while True:
            batch = consumer.poll()          # None or a batch; never waits
            if batch is not None:
                with batch:
                    prefill(batch[0]["image_0"])
            step()

Batches and owners are those of :mod:`asyncvmm`.  They may be used in any thread: a view is ordered
on the stream that is current in the thread that asks for it, and a release waits for those streams.

All exporters and consumers of a process share one thread, which runs an event loop (uvloop where
it is installed).  It starts with the first and ends with the last of them.  Every method may be
called from several threads at once.  Methods that wait take ``timeout``, in seconds (None: no
limit), and raise TimeoutError; one that runs out of time or is interrupted (Ctrl-C) has done
nothing, and loses nothing.  In a forked child everything raises :class:`asyncvmm.ForkError`.

When the interpreter exits while some are open, consumers leave in order and exporters hang up.
"""

from asyncvmm.blocking._acknowledgement import Acknowledgement as Acknowledgement
from asyncvmm.blocking._consumer import Consumer as Consumer
from asyncvmm.blocking._exporter import Exporter as Exporter
from asyncvmm.blocking._opening import connect as connect
from asyncvmm.blocking._opening import open_exporter as open_exporter
from asyncvmm.blocking._requests import abandon_features as abandon_features
from asyncvmm.blocking._requests import restore_features as restore_features
from asyncvmm.blocking._reservation import Reservation as Reservation
from asyncvmm.blocking._reservation import WritableOwner as WritableOwner

__all__ = [
    "Acknowledgement",
    "Consumer",
    "Exporter",
    "Reservation",
    "WritableOwner",
    "abandon_features",
    "connect",
    "open_exporter",
    "restore_features",
]
