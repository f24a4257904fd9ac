"""The user's side: the attached objects, their step loop and the data position."""
