"""What is trained how: each algorithm is a file that reads from top to bottom. `trainers.loop` goes on around it."""
