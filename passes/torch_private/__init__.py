"""Every private torch import and every difference between torch versions, behind public names."""
