"""Tickets, and the life of requests whose features travel by ticket.

``exporter.export`` makes tickets and ``consumer.reconstruct`` redeems them; what a request needs
around that is here: :class:`FeatureTransport` replaces the tensors in the fields of requests by
tickets, and :func:`restore_features` puts tensors back at the other end.
"""

from asyncvmm._ticket import OwnerTicket as OwnerTicket
from asyncvmm._ticket import Ticket as Ticket
from asyncvmm._ticket import Tickets as Tickets
from asyncvmm.tickets.receiving import abandon_features as abandon_features
from asyncvmm.tickets.receiving import restore_features as restore_features
from asyncvmm.tickets.requests import FeatureItem as FeatureItem
from asyncvmm.tickets.requests import FeatureRequest as FeatureRequest
from asyncvmm.tickets.transport import FeatureTransport as FeatureTransport
from asyncvmm.tickets.transport import TransportStatistics as TransportStatistics

__all__ = [
    "FeatureItem",
    "FeatureRequest",
    "FeatureTransport",
    "OwnerTicket",
    "Ticket",
    "Tickets",
    "TransportStatistics",
    "abandon_features",
    "restore_features",
]
