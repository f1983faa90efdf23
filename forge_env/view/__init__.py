"""A local web page over the folders of runs: what the agents did, why the reward moved, where the time went."""
