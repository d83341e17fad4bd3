"""What prints the generated pages under docs/, and holds them to what the code says."""
