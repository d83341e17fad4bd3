"""What a person sees: the console, the dashboard, the report, run listings, loggers."""
