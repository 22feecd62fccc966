"""Object storage: a protocol and its adapters. Importing this package imports no SDK."""

from __future__ import annotations

from kernel_tools.stores.base import ObjectInfo, ObjectStore

__all__ = ["ObjectInfo", "ObjectStore"]
