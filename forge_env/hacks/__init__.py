"""Signs that agents earn their reward in another way than was meant."""
