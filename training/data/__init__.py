"""The data that models are trained and measured on."""
