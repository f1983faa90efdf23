"""Questions about the tables of a database, answered with SQL and Python."""

from environments.data_analysis.environment import DataAnalysis, DataAnalysisConfig

__all__ = ["DataAnalysis", "DataAnalysisConfig"]
