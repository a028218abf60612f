"""What every study is made of: arms with records, statistics, claims, tables, figures, pages and image sets."""
