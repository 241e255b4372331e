"""What transfer, admission, router, idling and starting cost, beside their goals."""
