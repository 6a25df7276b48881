"""The laboratory: the commands of `gradferry`, what they train and measure, and what they show."""
