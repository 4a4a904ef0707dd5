"""What is special to Ray's inside, behind one door: pool size, back-pressure, placement."""
