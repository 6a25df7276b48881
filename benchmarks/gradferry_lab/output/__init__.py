"""What a command leaves behind: a table on the terminal, Markdown, JSON, PNG curves."""
