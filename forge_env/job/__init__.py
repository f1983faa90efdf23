"""The machines of a run: addresses of its workers, checks of their hosts, and placement of its actors."""
