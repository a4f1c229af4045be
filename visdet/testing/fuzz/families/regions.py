FAMILIES: tuple = ()
