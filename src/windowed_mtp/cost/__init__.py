"""What a decode step costs: from a model's geometry to bytes and operations, and what was measured."""
