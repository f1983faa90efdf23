"""Tasks in SWE-bench's format."""

from environments.swe_bench.environment import SWEBench, SWEBenchConfig

__all__ = ["SWEBench", "SWEBenchConfig"]
