"""What a measurement says: figures, tables, plots, comparisons and the file that keeps them."""
