"""What the user asks for: rules, the mapping they form, and which rule decides a class name."""
