"""Where rank zero is reached: interfaces, address selection, the TCP store."""
