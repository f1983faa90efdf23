"""Rollout workers: processes that play episodes and hand groups to the buffer, behind one handle, `Rollouts`."""
