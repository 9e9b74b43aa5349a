"""Prometheus metrics: what is exported (families, collector), how it is served (http), loop lag (lag).

The request path touches plain numbers only (`kvstore.meters`, `Group.counters`); everything here runs when
somebody scrapes.
"""

from __future__ import annotations

from kvstore.rpc.metrics.collector import StoreCollector
from kvstore.rpc.metrics.families import Sources
from kvstore.rpc.metrics.http import MetricsServer
from kvstore.rpc.metrics.lag import LoopLag

__all__ = ["LoopLag", "MetricsServer", "Sources", "StoreCollector"]
