"""What happened: figures, tables, the summary and the folder of a result."""
