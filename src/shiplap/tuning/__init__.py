"""What is fastest, measured, and only when asked."""
