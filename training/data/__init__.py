"""What models are trained and measured on."""
