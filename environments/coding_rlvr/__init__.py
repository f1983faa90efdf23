"""Procedurally generated Python tasks with a tool to try code and hidden tests that determine the reward."""

from environments.coding_rlvr.environment import CodingRLVR, CodingRLVRConfig

__all__ = ["CodingRLVR", "CodingRLVRConfig"]
