"""The shop's pages."""

from pathlib import Path

from django.conf import settings
from django.core.paginator import Paginator
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_http_methods, require_safe

from receipts.progress import progress_of
from shop import mails
from shop.forms import OrderForm
from shop.models import Order
from shop.orders import place_order

PAGE_SIZE = 20

# A mail was written elsewhere: it may style itself, but it may fetch, run and submit nothing.
MAIL_POLICY = (
    "default-src 'none'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; frame-src 'self'"
)


@require_safe
def order_list(request: HttpRequest) -> HttpResponse:
    """All orders, the newest first, each with the state of its receipt."""
    orders = Order.objects.prefetch_related("lines")
    page = Paginator(orders, PAGE_SIZE).get_page(request.GET.get("page"))
    shown = list(page.object_list)
    progress = progress_of([order.receipt_job for order in shown])
    rows = [(order, progress[order.receipt_job]) for order in shown]
    return render(request, "shop/order_list.html", {"page": page, "rows": rows})


@require_http_methods(["GET", "HEAD", "POST"])
def order_new(request: HttpRequest) -> HttpResponseBase:
    """The order form. An order that cannot be placed writes nothing and answers 422."""
    if request.method != "POST":
        return render(request, "shop/order_new.html", {"form": OrderForm()})
    form = OrderForm(request.POST)
    if not form.is_valid():
        return render(request, "shop/order_new.html", {"form": form}, status=422)
    return redirect(place_order(email=form.cleaned_data["email"], lines=form.lines()))


@require_safe
def order_detail(request: HttpRequest, order_id: int) -> HttpResponse:
    """One order, and where its receipt is. The attribute `data-job-id` names the obligation."""
    order = get_object_or_404(Order.objects.prefetch_related("lines"), pk=order_id)
    receipt = progress_of([order.receipt_job])[order.receipt_job]
    return render(request, "shop/order_detail.html", {"order": order, "receipt": receipt})


@require_safe
def mail_list(request: HttpRequest) -> HttpResponse:
    """The mails that a local mail server received, the latest first."""
    page = Paginator(mails.files(_mail_folder()), PAGE_SIZE).get_page(request.GET.get("page"))
    shown = [mails.read(file) for file in page.object_list]
    return render(request, "shop/mail_list.html", {"page": page, "mails": shown})


@require_safe
def mail_detail(request: HttpRequest, name: str) -> HttpResponse:
    """One mail; its HTML part is shown in a frame that may do nothing."""
    file = next((file for file in mails.files(_mail_folder()) if file.name == name), None)
    if file is None:
        raise Http404("There is no such mail.")
    response = render(request, "shop/mail_detail.html", {"mail": mails.read(file)})
    response["Content-Security-Policy"] = MAIL_POLICY
    return response


@require_safe
def healthz(request: HttpRequest) -> HttpResponse:
    """Say that this process answers."""
    return HttpResponse("ok", content_type="text/plain")


def _mail_folder() -> Path:
    if not settings.SHOP_MAIL_FOLDER:
        raise Http404("This shop keeps no mails to look at: SHOP_MAIL_FOLDER is not set.")
    return Path(settings.SHOP_MAIL_FOLDER)
