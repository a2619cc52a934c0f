"""Ports for tests that must name one."""

from __future__ import annotations

from benchmarks.soak.free_port import free_port

__all__ = ["free_port"]
