"""What a command leaves behind: a table on the terminal, JSON, PNG curves, one HTML page."""
