"""Record of a run's stream: its settings, hashes and events, by which others make it again and check it."""
