"""What ELDR's authors measured on 24 MI300X, cell by cell, beside this simulator."""
