"""What would happen, worked out before anything is changed: plans and what is found in them."""
