"""How good an environment's tasks are: wrong versions of gold solutions, as made and judged by `forge-env grade`."""
