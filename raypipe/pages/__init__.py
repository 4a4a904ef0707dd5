"""What people look at: HTML pages and pictures."""
