"""Between rollouts and trainer: who may start, what is trained next, and how old it can be."""
