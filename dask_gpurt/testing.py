"""Conformance checks for the protocols, for our tests and for those of anybody who implements one."""

from __future__ import annotations
