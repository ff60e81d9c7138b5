"""What every page of the shop may show."""

from django.conf import settings
from django.http import HttpRequest


def mails(request: HttpRequest) -> dict[str, object]:
    """Tell the navigation whether there are mails to look at."""
    return {"has_mails": bool(settings.SHOP_MAIL_FOLDER)}
