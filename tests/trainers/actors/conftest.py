"""Monarch reads its settings when it is imported."""

from __future__ import annotations

from trainers.loop.stack import prepare_controller

prepare_controller()
