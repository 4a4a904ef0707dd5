"""What is special to Ray's inside, behind one door: executions and their pools, trainers, clusters."""
