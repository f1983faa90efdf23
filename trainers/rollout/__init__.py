"""Episodes, played in processes of their own: environments, sandboxes, chat format, groups. One handle to them all."""
