"""Credit of tool calls by counterfactual (`forge-env credit`)."""
