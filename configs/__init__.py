"""The recipes that come with kvcompress, one YAML each."""
