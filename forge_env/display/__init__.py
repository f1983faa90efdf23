"""What people see of a run or an evaluation: while it goes on, and afterwards."""
