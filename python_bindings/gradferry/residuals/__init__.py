"""What is kept and saved: residuals by tile, and the state that holds them."""
