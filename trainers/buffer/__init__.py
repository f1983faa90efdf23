"""The replay buffer between rollouts and trainer: admission, the order of training, and the staleness bound."""
