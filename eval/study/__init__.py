"""What studies share: models that are trained alike to answer a question, and measured."""
