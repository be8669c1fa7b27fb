"""What the machine is: link classes, and the link times learned online."""
