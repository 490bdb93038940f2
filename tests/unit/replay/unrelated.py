"""What answers the unrelated tasks of `learn --real`, in their order."""

RIGHT = ("Paris", "56", "Jupiter", "Au", "366", "William Shakespeare", "12", "Bonjour", "carbon dioxide", "100",
         "The Atlantic", "nine", "Portuguese", "went", "1945", "2, 5, 9", "descend", "six", "def", "DISTINCT",
         "Not Found", "stressed", "30", "October")  # fmt: skip
