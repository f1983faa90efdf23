"""Procedurally generated Python tasks with a tool to try code and hidden tests that decide the reward."""

from environments.coding_rlvr.environment import CodingRLVR, CodingRLVRConfig

__all__ = ["CodingRLVR", "CodingRLVRConfig"]
