"""What the memory is worth: models that differ in their memory alone, trained alike from scratch."""
