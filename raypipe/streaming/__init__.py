"""The plan on Ray Data: source, actors, supervisor, each rank's share, digest."""
